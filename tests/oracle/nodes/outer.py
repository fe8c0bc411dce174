"""Write files into the node's folder, one of them in a folder below."""

from tests.oracle.app import note


def run(out, tag=None):
    note("outer", {"out": out})
    if out is not None:
        for name in ("a.png", "b.csv", "c.json", "d"):
            (out / name).write_text("hello")
        (out / "deep").mkdir(exist_ok=True)
        (out / "deep" / "e.txt").write_text("deep")
    return {"v": 1, "primary_file": "a.png"}
