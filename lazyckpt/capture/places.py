"""Where training sees a storage: the places of tensors in a list, by the identity of their storage."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain


class Places:
    """A mapping that is kept from save to save, in a tenth of a dict's memory. A look-up takes microseconds."""

    def __init__(self, places: Mapping[int, Sequence[int]]) -> None:
        self._identities = array("Q", sorted(places))  # ``_cdata``
        columns = [places[identity] for identity in self._identities]
        self._ends = array("I", accumulate(map(len, columns)))  # in _places
        self._places = array("I", chain.from_iterable(columns))

    def __contains__(self, identity: object) -> bool:
        return isinstance(identity, int) and self._at(identity) is not None

    def of(self, identity: int) -> list[int]:
        """The places of the tensors that view this storage; none if it is unknown."""
        at = self._at(identity)
        if at is None:
            return []
        begin = self._ends[at - 1] if at else 0
        return list(self._places[begin : self._ends[at]])

    def _at(self, identity: int) -> int | None:
        at = bisect_left(self._identities, identity)
        return at if at < len(self._identities) and self._identities[at] == identity else None
