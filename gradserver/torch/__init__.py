"""torch.distributed's backend "gradserver": a training script changes one word.

    torch.distributed.init_process_group("gradserver")

Scripts need not import this package: torch does, by an entry point. docs/torch-backend.md is its guide.

    entry         what torch finds at `import torch`
    creating      groups, as torch asks for them
    coordinator   GRADSERVER_URL, or a coordinator that rank 0 starts
    groups        the classes that torch sees, over one table of operations
    operations    that table: each operation of torch, by the collectives of a worker
    work          operations under way, and their futures
    errors        gradserver's errors, which are errors of torch's backends too
    private       names of torch that are not public
"""
