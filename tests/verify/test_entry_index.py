"""One operator is verified by the entries that call it, which an index knows."""

from __future__ import annotations

import json

import pytest

from apportion.verify import entry_index, survey
from apportion.verify.entry_index import INDEX, entries_calling, index_version
from apportion.verify.torch_samples import entries, entry_name, samples_of_entry

is_indexed = pytest.mark.skipif(
    json.loads(INDEX.read_text())["torch"] != index_version(), reason="another version of torch"
)


@pytest.mark.slow
@is_indexed
def test_the_index_has_what_entries_call() -> None:
    """A few of them; `tools/entry_operators.py` runs all."""
    every = {entry_name(entry): entry for entry in entries()}
    index = json.loads(INDEX.read_text())
    assert index["entries"].keys() == every.keys()
    for name in ("mm", "softmax.with_dtype", "nn.functional.layer_norm", "sort"):
        called = {str(sample.target) for sample in samples_of_entry(every[name])}
        assert called == {index["operators"][k] for k in index["entries"][name]}


@is_indexed
def test_an_operator_needs_few_entries() -> None:
    asked = survey._entries(survey.SurveyRequest(("aten.mm",)), print)
    assert "mm" in asked and len(asked) < 100
    assert survey._entries(survey.SurveyRequest(("aten.nothing",)), print) == []
    assert len(survey._entries(survey.SurveyRequest(()), print)) == len(entries())


def test_another_version_of_torch_walks_all_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_index, "index_version", lambda: "0.0.0")
    assert entries_calling(["aten.mm"]) is None
    said: list[str] = []
    assert len(survey._entries(survey.SurveyRequest(("aten.mm",)), said.append)) == len(entries())
    assert "which takes minutes" in said[0]
