"""serve: a page on this machine that stays open, to search, compare and change plans by hand.

In: requests of a browser on the loopback address. Out: the page, and answers in JSON. Searches run
in processes of their own, so that one can be stopped or die and the page goes on.
Read workbench.py first (plans and searches that are open), then search_process.py and
search_worker.py (a search), page_requests.py (what a request may say) and server.py (HTTP).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from apportion.faces import lazy_face

if TYPE_CHECKING:
    from apportion.serve.server import (
        serve as serve,
    )

lazy_face(__name__)
