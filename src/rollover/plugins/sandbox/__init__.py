"""The reward `code`: programs of the policy run against tests in a sandbox."""
