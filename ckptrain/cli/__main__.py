"""`python -m ckptrain.cli`: the command line without its script on the path, as the launcher starts it."""

import os

from ckptrain.cli.launched import as_rank
from ckptrain.cli.main import main

if __name__ == "__main__":
    with as_rank(os.environ):
        main()
