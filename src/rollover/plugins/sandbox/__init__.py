"""Programs that a model wrote, run against tests where they can do no harm."""
