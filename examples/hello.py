from queue_workflows import node, workflow


@node
def count(text: str) -> int:
    return len(text.split())


@node
def tell(words: int) -> str:
    return f"{words} words"


@workflow
def hello(text: str) -> str:
    return tell(count(text))
