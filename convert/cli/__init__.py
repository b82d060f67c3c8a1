"""The command line: every command, thin; errors → exit codes; results as text."""
