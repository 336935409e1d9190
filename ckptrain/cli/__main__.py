"""`python -m ckptrain.cli`: the command line without its script on the path, as the launcher starts it."""

from ckptrain.cli.main import main

if __name__ == "__main__":
    main()
