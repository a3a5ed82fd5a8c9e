"""PR #22088: weights that a running server is given from disk reached the target alone.

The draft went on with the old ones: its proposals were right by chance, and verification hid it. The other way that needs
neither a second process nor a GPU, `update_weights_from_tensor`, reached both all along.
"""

from ..entry import Edit, Entry, Loses, Patch, Request, SGLangSettings, small_case

ENTRY = Entry(
    id="22088",
    title="Give new weights to the draft as well",
    rule="draft.kv",
    buggy="0.5.9 - 0.5.10.post1",
    fixed="0.5.11",
    last_bad="0.5.10.post1",
    trigger="update_weights_from_disk, and a draft whose weights lie in the same checkpoint",
    loses=Loses("always", layers=False, needs="weight updates"),
    revert=Patch(
        name="revert-22088",
        edits=(
            Edit(
                target="sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.update_weights_from_disk",
                match="self._select_runners()",
                replacement='self._select_runners("target")',
            ),
        ),
        otherwise=(  # before there was a choice of runners
            Edit(
                target="sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.update_weights_from_disk",
                match="if success and self.draft_worker is not None:",
                replacement="if False:",
            ),
        ),
    ),
    case=small_case(Request(id="a", prompt=(7,), max_new_tokens=2), sglang=SGLangSettings(update_weights="disk")),
)
