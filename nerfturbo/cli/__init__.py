"""The command line: `main` finds the verb, one file per verb does it. The only place that prints."""
