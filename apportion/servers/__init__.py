"""servers: tables of rows that processes share, and that may be a little stale.

In: rows that are asked for and deltas that are added, by any process at any time. Out: rows that
are never older than a bound, while what matters most travels first. Every process is a client and
has a shard of every table. Public as `apportion.tables`. Read table_store.py first (what users
call, and the threads behind it), then update_log.py (what a client has not sent yet), row_shard.py
(what a server has), priorities.py, send_budget.py, adaptive_revision.py, and messages.py with the
two ways to carry them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from apportion.faces import lazy_face

if TYPE_CHECKING:
    from apportion.servers.join_tables import join as join
    from apportion.servers.join_tables import settings as settings
    from apportion.servers.messages import GlooMessages as GlooMessages
    from apportion.servers.messages import LocalMessages as LocalMessages
    from apportion.servers.messages import TableMessage as TableMessage
    from apportion.servers.messages import TableMessages as TableMessages
    from apportion.servers.messages import local_hub as local_hub
    from apportion.servers.table_store import StoreSettings as StoreSettings
    from apportion.servers.table_store import Table as Table
    from apportion.servers.table_store import TableStore as TableStore

lazy_face(__name__)
