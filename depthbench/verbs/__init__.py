"""The command line's verbs, a module each: add_arguments(parser) declares its flags, run(args) -> int does it, heavy imports inside."""
