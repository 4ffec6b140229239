"""checkpoint: the state of a training run in files, and back, under any plan.

In: a Program and the tensors of its ranks, or a plain model and optimizer. Out: folders of
safetensors files with a record, written by all ranks while they train; and their tensors again, on
other devices, under another plan, or in plain PyTorch. torch.distributed.checkpoint reads and
writes; what comes from a file is checked, and nothing in it is executed.
Read state_regions.py first (who has what), chunks.py (regions as boxes of whole tensors),
staging.py, write_part.py and saver.py (saving), folder.py and checkpoint_record.py (what a
checkpoint is), stored.py and match_state.py (reading), rank_state.py (one rank), whole_state.py and
plain_model.py (PyTorch's own form).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from apportion.faces import lazy_face

if TYPE_CHECKING:
    from apportion.checkpoint.agreement import (
        first_rank_says as first_rank_says,
    )
    from apportion.checkpoint.agreement import (
        own_rank as own_rank,
    )
    from apportion.checkpoint.agreement import (
        raise_on_all as raise_on_all,
    )
    from apportion.checkpoint.agreement import (
        rank_count as rank_count,
    )
    from apportion.checkpoint.agreement import (
        told_by_all as told_by_all,
    )
    from apportion.checkpoint.agreement import (
        told_by_first as told_by_first,
    )
    from apportion.checkpoint.checkpoint_record import (
        CheckpointRecord as CheckpointRecord,
    )
    from apportion.checkpoint.chunks import (
        Chunk as Chunk,
    )
    from apportion.checkpoint.chunks import (
        first_fault as first_fault,
    )
    from apportion.checkpoint.folder import (
        check_is_ours as check_is_ours,
    )
    from apportion.checkpoint.folder import (
        find_checkpoint as find_checkpoint,
    )
    from apportion.checkpoint.folder import (
        last_checkpoint as last_checkpoint,
    )
    from apportion.checkpoint.folder import (
        remove_unfinished as remove_unfinished,
    )
    from apportion.checkpoint.group_settings import (
        plain_groups as plain_groups,
    )
    from apportion.checkpoint.group_settings import (
        put_groups as put_groups,
    )
    from apportion.checkpoint.plain_model import (
        Resumed as Resumed,
    )
    from apportion.checkpoint.plain_model import (
        export_file as export_file,
    )
    from apportion.checkpoint.plain_model import (
        give_others as give_others,
    )
    from apportion.checkpoint.plain_model import (
        kept_others as kept_others,
    )
    from apportion.checkpoint.plain_model import (
        load_checkpoint as load_checkpoint,
    )
    from apportion.checkpoint.plain_model import (
        load_live as load_live,
    )
    from apportion.checkpoint.plain_model import (
        resumed_from as resumed_from,
    )
    from apportion.checkpoint.plain_model import (
        save_checkpoint as save_checkpoint,
    )
    from apportion.checkpoint.rank_state import (
        RankState as RankState,
    )
    from apportion.checkpoint.saver import (
        CheckpointSaver as CheckpointSaver,
    )
    from apportion.checkpoint.saver import (
        SaveRequest as SaveRequest,
    )
    from apportion.checkpoint.saver import (
        run_name as run_name,
    )
    from apportion.checkpoint.staging import (
        bytes_beside_steps as bytes_beside_steps,
    )
    from apportion.checkpoint.state_regions import (
        MODEL as MODEL,
    )
    from apportion.checkpoint.stored import (
        StoredCheckpoint as StoredCheckpoint,
    )
    from apportion.checkpoint.stored import (
        open_checkpoint as open_checkpoint,
    )
    from apportion.checkpoint.whole_state import (
        gather_state as gather_state,
    )
    from apportion.checkpoint.whole_state import (
        put_whole as put_whole,
    )
    from apportion.checkpoint.whole_state import (
        state_dicts as state_dicts,
    )

lazy_face(__name__)
