"""The verbs of the command line, a file each. Imports of what a verb needs stay inside it, so that help is instant.

A verb returns by ``raise typer.Exit(status)`` (``statuses.py``). Results go to stdout, messages to stderr.
"""
