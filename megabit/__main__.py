"""``python -m megabit``: the same as the ``megabit`` command."""

from megabit.cli.main import main

main()
