"""`python -m utils.memory`: build the counting allocator, and say what the meter will read."""

from utils.memory.source import prepare

if __name__ == "__main__":
    print(prepare())
