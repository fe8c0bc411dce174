"""Read handwritten digits in ten threads that share one classifier."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from queue_workflows import local_queue, model_registry
from queue_workflows.model_cache import ModelCache

THREADS = 10
LEARNED = 1000
"""The images that the classifier learns from; the jobs read the others."""
IMAGES_PER_JOB = 40

models = ModelCache(capacity=2)


class Digits(NamedTuple):
    """A fitted classifier, and the images with their digits."""

    classifier: Any
    images: Any
    labels: Any


def load() -> Digits:
    """Fit the classifier on the first images of the data set that scikit-learn brings along."""
    from sklearn import datasets, svm

    images, labels = datasets.load_digits(return_X_y=True)
    classifier = svm.SVC(gamma=0.001).fit(images[:LEARNED], labels[:LEARNED])
    return Digits(classifier, images, labels)


def read_images(job: local_queue.Job) -> dict[str, int]:
    """Read the images of a job; return how many were read right."""
    part = slice(job.args["first"], job.args["first"] + IMAGES_PER_JOB)
    # The first thread loads the model, the others wait for it. It stays while the block runs.
    with models.using("digits") as digits:
        found = digits.classifier.predict(digits.images[part])
        labels = digits.labels[part]
    right = sum(int(one == other) for one, other in zip(found, labels, strict=True))
    return {"right": right, "read": len(labels)}


def run(load: Callable[[], Digits] = load, images: int = 1797) -> dict[str, Any]:
    """Read all images but the learned ones; return the sums."""
    loads: list[float] = []

    def counted() -> Digits:
        loads.append(time.monotonic())
        return load()

    model_registry.register(model_registry.ModelSpec("digits", counted))
    plan = local_queue.MemoryPlan(
        local_queue.Job(f"images-{first}", "read", {"first": first})
        for first in range(LEARNED, images, IMAGES_PER_JOB)
    )
    jobs = plan.fetch_ready()
    manager = local_queue.JobQueueManager(
        plan,
        read_images,
        workers=THREADS,
        single_job=False,
        grace_s=0,
        stagger_s=0,
        cooldown_s=0,
        max_attempts=1,
    )
    with manager:
        while (ended := [plan.entry(job.id) for job in jobs]) and any(
            entry.state in ("pending", "running") for entry in ended
        ):
            time.sleep(0.02)
    models.drop_cache()
    return {
        "jobs": len(jobs),
        "failed": [entry.error for entry in ended if entry.state == "failed"],
        "right": sum(entry.result["right"] for entry in ended if entry.result),
        "read": sum(entry.result["read"] for entry in ended if entry.result),
        "loads": len(loads),
    }
