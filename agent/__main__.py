"""`python -m agent` is `namegate`."""

from agent.cli import main

main(prog_name="namegate")
