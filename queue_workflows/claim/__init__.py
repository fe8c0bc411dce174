"""Change the state of claimed jobs of both families: claim, record, hand back, reclaim, admit."""
