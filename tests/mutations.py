"""Random changes of JSON data, always the same for a seed."""

import copy
import random

VALUES = [
    None,
    True,
    -1,
    0,
    3,
    10**30,
    0.5,
    float("nan"),
    "",
    "x",
    "\x1b[31mred",
    [],
    ["x"],
    [1],
    [[]],
    [None],
    {},
    {"x": 1},
    {"x": {"x": []}},
]


def places(data, path=()):
    """Every place in nested objects and lists, by its keys."""
    yield path
    keys = range(len(data)) if isinstance(data, list) else data if isinstance(data, dict) else ()
    for key in keys:
        yield from places(data[key], (*path, key))


def mutations(data, count, seed=0):
    """Copies of JSON data with one value changed, removed or added, each with a description."""
    generator = random.Random(seed)
    paths = [path for path in places(data) if path]
    for _ in range(count):
        changed, (*parents, last) = copy.deepcopy(data), generator.choice(paths)
        holder = changed
        for key in parents:
            holder = holder[key]
        action, value = generator.choice("rrrrda"), copy.deepcopy(generator.choice(VALUES))
        if action == "r":
            holder[last] = value
        elif action == "d":
            del holder[last]
        elif isinstance(holder, dict):
            holder[generator.choice(["x", "name", "\x1b[2J"])] = value
        else:
            holder.append(value)
        yield f"{action} {'.'.join(map(str, (*parents, last)))} {value!r}", changed
