"""The `baton` command: one file per subcommand. The only place that prints."""
