"""The words: frozen, slotted value types every room shares. Standard library only."""
