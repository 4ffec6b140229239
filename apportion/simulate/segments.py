"""How much memory an allocator holds whose segments grow in place.

Part of the room simulate. What is asked of the allocator and given back comes in, in the order in
which that happens; the bytes that it has taken from the device at the end go out, of which it gives
none back in between (as while a graph is recorded).

This is what torch's allocator does for CUDA with segments that grow: a request takes the smallest
free room that is large enough, the room at the end of the segment last, and leaves the rest of it
free; room that lies side by side is one. Where none is large enough, the segment grows by whole
pages. Small requests have a segment of their own.
"""

from __future__ import annotations

import numpy as np

from apportion.columns import Ints, compiled

MIB = 1 << 20
GRANULE, SMALL = 512, MIB  # bytes: what sizes are multiples of, and which are small
SEGMENT_PAGES = 20 * MIB, 2 * MIB  # of the large segment, of the small one


def segment_bytes(thing: Ints, nbytes: Ints) -> int:
    """Bytes held after all requests. Each is of a thing, known by its number: so many bytes, or 0
    where it is given back."""
    count = int(thing.max(initial=-1)) + 1
    columns = np.ascontiguousarray(thing, np.int64), np.ascontiguousarray(nbytes, np.int64)
    return sum(int(_grown(*columns, count, page, k == 1)) for k, page in enumerate(SEGMENT_PAGES))


@compiled
def _grown(thing: Ints, nbytes: Ints, count: int, page: int, small: bool) -> int:
    """Bytes of the segment of large or of small requests."""
    end, rooms = 0, 0
    at, room = np.zeros(len(thing) + 2, np.int64), np.zeros(len(thing) + 2, np.int64)  # free ones
    start, taken = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for k in range(len(thing)):
        size = (nbytes[k] + GRANULE - 1) // GRANULE * GRANULE
        if nbytes[k] > 0:
            if (size <= SMALL) != small:
                continue
            best = -1
            for r in range(rooms):
                if room[r] < size:
                    continue
                last = at[r] + room[r] == end
                if best < 0:
                    best = r
                    continue
                best_last = at[best] + room[best] == end
                if (best_last and not last) or (best_last == last and room[r] < room[best]):
                    best = r
            if best < 0:
                if rooms == 0 or at[rooms - 1] + room[rooms - 1] != end:
                    at[rooms], room[rooms] = end, 0
                    rooms += 1
                best = rooms - 1
                more = (size - room[best] + page - 1) // page * page
                room[best] += more
                end += more
            start[thing[k]], taken[thing[k]] = at[best], size
            at[best] += size
            room[best] -= size
            if room[best] == 0:
                for r in range(best, rooms - 1):
                    at[r], room[r] = at[r + 1], room[r + 1]
                rooms -= 1
        elif taken[thing[k]] > 0:
            here, size = start[thing[k]], taken[thing[k]]
            taken[thing[k]] = 0
            place = 0
            while place < rooms and at[place] < here:
                place += 1
            before = place > 0 and at[place - 1] + room[place - 1] == here
            after = place < rooms and here + size == at[place]
            if before and after:
                room[place - 1] += size + room[place]
                for r in range(place, rooms - 1):
                    at[r], room[r] = at[r + 1], room[r + 1]
                rooms -= 1
            elif before:
                room[place - 1] += size
            elif after:
                at[place] = here
                room[place] += size
            else:
                for r in range(rooms, place, -1):
                    at[r], room[r] = at[r - 1], room[r - 1]
                at[place], room[place] = here, size
                rooms += 1
    return end
