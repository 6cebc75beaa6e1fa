"""What a coordinator writes down: the files (`gradserver.ledger.state`), and how they are read (`.command`)."""
