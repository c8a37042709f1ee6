"""People: the actors' names, in two disjoint pools, so that names can be held out.

No name of either pool is a prefix of another, so a name is known once its last letter is read.
"""

TRAIN = (
    "Alice", "Bob", "Carol", "David", "Emma", "Frank", "Grace", "Henry", "Irene", "Jack", "Kevin", "Liam",
    "Maria", "Nathan", "Olivia", "Peter", "Quinn", "Rachel", "Samuel", "Teresa", "Ursula", "Victor", "Wendy", "Xavier",
)  # fmt: skip
HELD_OUT = (
    "Amir", "Bianca", "Cyrus", "Daphne", "Elias", "Fatima", "Goran", "Hana", "Ka", "Mei", "Sherrie", "Zoe",
)  # fmt: skip

POOLS = {"train": TRAIN, "held-out": HELD_OUT, "all": TRAIN + HELD_OUT}
ALL = POOLS["all"]
