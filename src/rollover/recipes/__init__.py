"""The recipes, as TOML, and what those that need classes of their own name in them."""
