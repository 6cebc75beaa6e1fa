"""The ledger of a coordinator: its files (`gradserver.ledger.state`), and the command that reads them (`.command`)."""
