"""All dashboards, by the name of their file in dashboards/json."""

from dashboards.boards import fleet, itself, node, oom, training

BOARDS = {
    "fleet": fleet.BOARD,
    "training-memory": training.BOARD,
    "node": node.BOARD,
    "oom": oom.BOARD,
    "self": itself.BOARD,
}
