"""The recipes as TOML, and the classes that some of them name."""
