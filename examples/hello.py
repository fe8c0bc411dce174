import queue_workflows


def count(text):
    return {"words": len(text.split())}


def write(words, out):
    (out / "answer.txt").write_text(f"{words} words\n")


def one_node(node, key):
    return {"nodes": [{"id": node, "inputs": [{"name": key, "from": f"pipeline.{key}"}]}]}


PIPELINES = {"count": one_node("count", "text"), "write": one_node("write", "words")}
READ = {"id": "read", "kind": "pipeline", "pipeline": "count"}
READ["inputs"] = {"text": {"$from": "text"}}
TELL = {"id": "tell", "kind": "pipeline", "pipeline": "write", "depends_on": ["read"]}
TELL["inputs"] = {"words": {"$from": "read/count.words"}}
WORKFLOWS = {"hello": {"name": "hello", "steps": [READ, TELL]}}

queue_workflows.register_node("count", count)
queue_workflows.register_node("write", write)
queue_workflows.set_workflow_provider(WORKFLOWS.__getitem__, PIPELINES.__getitem__)
