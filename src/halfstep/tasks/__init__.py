"""Tasks: real training problems small enough for any machine, and the measurements on them."""

from halfstep.errors import TaskError
from halfstep.tasks.machine import machine
from halfstep.tasks.task import Task, load_task, task_names

__all__ = ["Task", "TaskError", "load_task", "machine", "task_names"]
