"""execute: a TaskGraph runs on real tensors.

In: a Program's Graph, a Space, a TaskGraph and the tensors of a rank. Out: losses, new state, and
a measured Timeline. A rank runs its own rows of the same TaskGraph that simulate/ times.
Read executable.py first, then kernels/ (how a part of an operator runs), rank.py (the tensors of a
device), feed.py (its batches), rank_steps.py (what one rank does in a step), ladder.py (the modes
that its segments run in; generate.py and fused_update.py make the default one), transport.py and
backends.py (messages between processes), peer_memory.py (those of one machine), wire.py (those of
several), dry_run.py (storage without data) and allocations.py (what torch allocates).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from apportion.faces import lazy_face

if TYPE_CHECKING:
    from apportion.execute.allocations import (
        allocated_peak as allocated_peak,
    )
    from apportion.execute.allocations import (
        memory_profile as memory_profile,
    )
    from apportion.execute.backends import (
        Backends as Backends,
    )
    from apportion.execute.backends import (
        Parcel as Parcel,
    )
    from apportion.execute.backends import (
        PeerLost as PeerLost,
    )
    from apportion.execute.backends import (
        join_backends as join_backends,
    )
    from apportion.execute.backends import (
        peer_errors as peer_errors,
    )
    from apportion.execute.cuda_clock import (
        CudaClock as CudaClock,
    )
    from apportion.execute.device_streams import (
        BACK as BACK,
    )
    from apportion.execute.device_streams import (
        OUT as OUT,
    )
    from apportion.execute.device_streams import (
        CudaStreams as CudaStreams,
    )
    from apportion.execute.dry_run import (
        device_memory_facts as device_memory_facts,
    )
    from apportion.execute.dry_run import (
        measure_storage as measure_storage,
    )
    from apportion.execute.executable import (
        Executable as Executable,
    )
    from apportion.execute.executable import (
        local_shape as local_shape,
    )
    from apportion.execute.executable import (
        slices as slices,
    )
    from apportion.execute.executable import (
        threads as threads,
    )
    from apportion.execute.feed import (
        StagedBatch as StagedBatch,
    )
    from apportion.execute.feed import (
        feed_of as feed_of,
    )
    from apportion.execute.fused_update import (
        fused_updates as fused_updates,
    )
    from apportion.execute.host_adam import (
        AdamSettings as AdamSettings,
    )
    from apportion.execute.host_adam import (
        adam_parts as adam_parts,
    )
    from apportion.execute.host_jobs import (
        HostJob as HostJob,
    )
    from apportion.execute.host_jobs import (
        HostJobs as HostJobs,
    )
    from apportion.execute.kernels.base import (
        Context as Context,
    )
    from apportion.execute.kernels.base import (
        dtype as dtype,
    )
    from apportion.execute.kernels.base import (
        kernel as kernel,
    )
    from apportion.execute.ladder import (
        ladder as ladder,
    )
    from apportion.execute.ladder import (
        mode_of as mode_of,
    )
    from apportion.execute.peer_memory import (
        carrier as carrier,
    )
    from apportion.execute.pinned_memory import (
        PinnedMemory as PinnedMemory,
    )
    from apportion.execute.rank import (
        Rank as Rank,
    )
    from apportion.execute.rank import (
        combine as combine,
    )
    from apportion.execute.rank import (
        run_together as run_together,
    )
    from apportion.execute.rank_steps import (
        Exchange as Exchange,
    )
    from apportion.execute.rank_steps import (
        Post as Post,
    )
    from apportion.execute.rank_steps import (
        Segment as Segment,
    )
    from apportion.execute.replica_notes import (
        replica_notes as replica_notes,
    )
    from apportion.execute.replicas import (
        ReplicaCheck as ReplicaCheck,
    )
    from apportion.execute.run_part import (
        padded as padded,
    )
    from apportion.execute.segment_cut import (
        compiled_pieces as compiled_pieces,
    )
    from apportion.execute.transport import (
        Worker as Worker,
    )
    from apportion.execute.transport import (
        worker as worker,
    )

lazy_face(__name__)
