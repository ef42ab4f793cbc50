"""What every contract test gets."""

from integration.conftest import forked_children as forked_children
