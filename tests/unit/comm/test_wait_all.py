"""Operations of several parts take turns while they are waited for."""

from __future__ import annotations

from plait.comm import wait_all


class Parts:
    """An operation of `number` parts and a last one, which writes down what is done."""

    def __init__(self, name: str, number: int, done: list[str]) -> None:
        self._name, self._left, self._done = name, number, done

    def advance(self) -> bool:
        if self._left:
            self._left -= 1
            self._done.append(f"{self._name} part")
        return self._left > 0

    def wait(self) -> None:
        while self.advance():
            pass
        self._done.append(f"{self._name} ends")


def test_parts_take_turns() -> None:
    done: list[str] = []
    wait_all([Parts("a", 2, done), Parts("b", 0, done), Parts("c", 1, done)])
    assert done == ["a part", "c part", "a part", "a ends", "b ends", "c ends"]
