"""The running side: claim jobs, run their actions, settle what came of them."""
