"""The weights of `engine_process`: of version v, every element is v."""

SHAPES = {"a.weight": (3, 4), "b.weight": (5,), "c.weight": (6,), "d.weight": (7,)}
