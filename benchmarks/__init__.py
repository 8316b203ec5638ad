"""What produces every number that the README quotes; each module is a command of its own."""
