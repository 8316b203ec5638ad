"""How well each policy loss learns from data of a known lag."""
