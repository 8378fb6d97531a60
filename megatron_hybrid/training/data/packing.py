"""Packing of sequences in rows."""

import numpy as np


def pack(lengths: np.ndarray, capacity: int, random: np.random.RandomState) -> list[np.ndarray]:
    """Pack sequences in rows by best fit, longest first; equal ones and the rows in random order.

    Args:
        lengths: int [n], each at most `capacity`.
        capacity: of a row.
        random: its draws alone decide the order.

    Returns:
        Rows: places in `lengths` of their sequences, int64.
    """
    shuffled = random.permutation(len(lengths))
    order = shuffled[np.argsort(-lengths[shuffled].astype(np.int64), kind="stable")]
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms = 0  # bit n: some row has room for exactly n more
    for place, length in zip(order.tolist(), lengths[order].tolist()):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms &= ~(1 << room)
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(place)
        if left := room - length:
            by_room.setdefault(left, []).append(row)
            rooms |= 1 << left
    return [np.array(rows[row]) for row in random.permutation(len(rows))]
