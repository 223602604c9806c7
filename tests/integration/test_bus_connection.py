"""The connection on a real server: what nats-py would get wrong without our guards, case by case."""

import asyncio
import time

import nats
import pytest

from shared.bus import Bus, LinkEvent, Msg, NoResponders
from shared.bus.connection import HELD_MESSAGES, Connection
from shared.errors import BusError, OutcomeUnknownError, TooLargeError
from shared.settings import ServiceSettings
from shared.testing.nats_server import NatsServer
from shared.testing.wait import until

SECOND_US = 1_000_000


class Ear:
    """Remembers the bodies that it hears."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def __call__(self, msg: Msg) -> None:
        self.bodies.append(msg.body)


async def test_a_request_that_nobody_listens_to_is_told_at_once(bus: Bus) -> None:
    began = time.monotonic()
    assert NoResponders("rt.nobody") == await bus.request("rt.nobody", b"", 10 * SECOND_US)
    assert [] == await bus.request_all("$SRV.PING.placer", wait_us=10 * SECOND_US)
    assert time.monotonic() - began < 5


async def test_headers_arrive_as_they_were_said_and_a_line_break_in_one_begins_no_other(bus: Bus) -> None:
    heard: list[Msg] = []

    async def hear(msg: Msg) -> None:
        heard.append(msg)

    await bus.subscribe("rt.heard", hear)
    for text in ("plain: ä", "a\r\nNats-Forged: b", "a\nb"):
        await bus.publish("rt.heard", b"body", headers={"Nats-Service-Error": text, "ce-id": "1"})
    await until(lambda: len(heard) == 3)
    errors = [msg.headers["Nats-Service-Error"].split() for msg in heard]
    assert [["plain:", "ä"], ["a", "Nats-Forged:", "b"], ["a", "b"]] == errors
    assert [{"Nats-Service-Error", "ce-id"}] * 3 == [set(msg.headers) for msg in heard]
    assert [b"body"] * 3 == [msg.body for msg in heard]


async def test_a_request_that_is_not_answered_in_time_has_an_unknown_outcome(bus: Bus) -> None:
    await bus.subscribe("rt.silent", Ear())
    with pytest.raises(OutcomeUnknownError, match="within 50000 us"):
        await bus.request("rt.silent", b"", 50_000)
    assert {} == bus.connection._waiting


async def test_a_request_fails_when_the_link_is_lost_and_not_at_its_time_out(bus: Bus, nats_server: NatsServer) -> None:
    ear = Ear()
    await bus.subscribe("rt.silent", ear)
    asking = asyncio.create_task(bus.request("rt.silent", b"", 60 * SECOND_US))
    await until(lambda: len(ear.bodies) == 1)
    nats_server.kill()
    with pytest.raises(OutcomeUnknownError, match="connection lost"):
        await asking


async def test_a_request_made_while_the_link_is_down_waits_for_it(
    bus: Bus, nats_server: NatsServer, settings: ServiceSettings
) -> None:
    other = await Bus.connect(settings, "other")

    async def echo(msg: Msg) -> None:
        await other.publish(msg.reply, msg.body)

    await other.subscribe("rt.echo", echo)
    nats_server.kill()
    await until(lambda: not bus.connection.is_up and not other.connection.is_up)
    asking = asyncio.create_task(bus.request("rt.echo", b"hello", 30 * SECOND_US))
    nats_server.start()
    answer = await asking
    if isinstance(answer, NoResponders):  # the asker was back before the answerer
        await until(lambda: other.connection.is_up)
        answer = await bus.request("rt.echo", b"hello", 30 * SECOND_US)
    assert isinstance(answer, Msg)
    assert b"hello" == answer.body
    await other.close()


async def test_B4_a_dead_link_is_noticed_after_three_pings(impatient_bus: Bus, nats_server: NatsServer) -> None:
    bus = impatient_bus
    nats_server.pause()
    began = time.monotonic()
    await until(lambda: not bus.connection.is_up)
    assert time.monotonic() - began < 3  # pings every 200 ms here; the client's own defaults take minutes
    nats_server.resume()
    await until(lambda: bus.connection.is_up)


async def test_a_dead_link_with_bytes_still_to_send_is_given_up_all_the_same(
    impatient_bus: Bus, nats_server: NatsServer
) -> None:
    bus = impatient_bus
    nats_server.pause()
    for _ in range(60):
        if not bus.connection.is_up:
            break
        await bus.publish("rt.metrics.a", b"x" * 500_000)
    await until(lambda: not bus.connection.is_up, timeout_s=10)
    nats_server.resume()
    await until(lambda: bus.connection.is_up)


async def test_B8_while_the_link_is_down_the_oldest_lossy_messages_go_first_and_are_counted(
    bus: Bus, nats_server: NatsServer, settings: ServiceSettings
) -> None:
    nats_server.kill()
    await until(lambda: not bus.connection.is_up)
    for number in range(HELD_MESSAGES + 10):
        await bus.publish("rt.metrics.a", b"%d" % number)
    assert 10 == bus.connection.counters["dropped"]
    ear = Ear()
    await bus.subscribe("rt.metrics.>", ear)
    nats_server.start()
    await until(lambda: len(ear.bodies) == HELD_MESSAGES)
    assert (b"10", b"%d" % (HELD_MESSAGES + 9)) == (ear.bodies[0], ear.bodies[-1])


async def test_B21_a_subscription_hears_again_after_a_restart(bus: Bus, nats_server: NatsServer) -> None:
    ear = Ear()
    await bus.subscribe("rt.metrics.>", ear)
    nats_server.restart(kill=True)
    await until(lambda: bus.connection.counters["reconnects"] == 1)
    await bus.publish("rt.metrics.a", b"after")
    await until(lambda: ear.bodies == [b"after"])


@pytest.mark.parametrize("limit", [0, 100])
async def test_B24_a_handler_that_raises_or_is_cancelled_does_not_end_its_subscription(bus: Bus, limit: int) -> None:
    seen: list[bytes] = []

    async def handler(msg: Msg) -> None:
        seen.append(msg.body)
        if msg.body == b"raise":
            raise ValueError("a bug")
        if msg.body == b"cancel":
            raise asyncio.CancelledError

    listening = await bus.connection.subscribe("rt.x", handler, limit=limit)
    for body in (b"raise", b"cancel", b"last"):
        await bus.publish("rt.x", body)
    await until(lambda: len(seen) == 3)
    assert 2 == bus.connection.counters["handler_failed"]
    await listening.stop()


async def test_what_is_taken_comes_in_order_over_a_reconnect_and_not_after_the_stop(
    bus: Bus, nats_server: NatsServer
) -> None:
    ear = Ear()
    listening = await bus.connection.subscribe("rt.x", ear, limit=0)
    await bus.publish("rt.x", b"before")
    await until(lambda: ear.bodies == [b"before"])
    nats_server.kill()
    await until(lambda: not bus.connection.is_up)
    nats_server.start()
    await bus.connection.wait_up()
    await bus.connection.round_trip()
    for number in range(3):
        await bus.publish("rt.x", b"%d" % number)
    await until(lambda: ear.bodies == [b"before", b"0", b"1", b"2"])
    await listening.stop()
    await bus.publish("rt.x", b"late")
    await bus.connection.round_trip()
    assert b"late" not in ear.bodies


async def test_what_is_not_handled_at_once_is_the_handlers_and_nothing_overtakes_it(bus: Bus) -> None:
    seen: list[tuple[str, bytes]] = []

    async def handler(msg: Msg) -> None:
        await asyncio.sleep(0)
        seen.append(("later", msg.body))

    def at_once(msg: Msg) -> bool:
        if msg.body == b"raise":
            raise ValueError("a bug")
        if msg.body != b"no":
            seen.append(("at once", msg.body))
        return msg.body != b"no"

    listening = await bus.connection.subscribe("rt.x", handler, at_once=at_once)
    for body in (b"1", b"no", b"2", b"raise"):
        await bus.publish("rt.x", body)
    await until(lambda: len(seen) == 4)
    await bus.publish("rt.x", b"raise")
    await until(lambda: len(seen) == 5)
    await bus.publish("rt.x", b"3")
    await until(lambda: len(seen) == 6)
    expected = [("at once", b"1"), *[("later", body) for body in (b"no", b"2", b"raise", b"raise")], ("at once", b"3")]
    assert expected == seen
    await listening.stop()


async def test_B3_draining_a_subscription_handles_what_had_arrived(bus: Bus) -> None:
    seen: list[bytes] = []
    go_on = asyncio.Event()

    async def slow(msg: Msg) -> None:
        await go_on.wait()
        seen.append(msg.body)

    listening = await bus.subscribe("rt.x", slow)
    for number in range(3):
        await bus.publish("rt.x", b"%d" % number)
    await bus.request_all("rt.nobody")  # a round trip: the three have arrived
    draining = asyncio.create_task(listening.drain())
    await asyncio.sleep(0)
    go_on.set()
    await draining
    assert [b"0", b"1", b"2"] == seen


async def test_B2_a_slow_consumer_is_counted_and_told(nats_url: str) -> None:
    told: list[LinkEvent] = []
    connection = Connection(told.append)
    await connection.open(nats_url, "slow", 2 * SECOND_US)
    go_on = asyncio.Event()
    seen: list[bytes] = []

    async def slow(msg: Msg) -> None:
        await go_on.wait()
        seen.append(msg.body)

    await connection.subscribe("rt.x", slow, limit=5)
    for number in range(10):
        await connection.publish("rt.x", b"%d" % number)
    await until(lambda: connection.counters["slow_consumer"] > 0)
    go_on.set()
    await until(lambda: len(seen) + connection.counters["slow_consumer"] == 10)
    assert LinkEvent("slow_consumer", "rt.x") in told
    await connection.close()


async def test_B13_every_start_is_a_new_client_whose_requests_work(settings: ServiceSettings) -> None:
    for _ in range(3):
        bus = await Bus.connect(settings, "again")
        assert isinstance(await bus.request("$JS.API.INFO", b"", 5 * SECOND_US), Msg)
        await bus.close()


async def test_B22_what_is_published_just_before_closing_arrives(bus: Bus, settings: ServiceSettings) -> None:
    ear = Ear()
    await bus.subscribe("rt.x", ear)
    await bus.request_all("rt.nobody")
    other = await Bus.connect(settings, "short")
    for number in range(100):
        await other.publish("rt.x", b"%d" % number)
    await other.close()
    await until(lambda: len(ear.bodies) == 100)


async def test_B7_a_subject_with_a_blank_is_refused_before_it_reaches_the_wire(bus: Bus) -> None:
    with pytest.raises(BusError, match=r"rt\.a b"):
        await bus.publish("rt.a b", b"")


async def test_a_body_over_the_servers_limit_is_refused_and_the_link_stays(bus: Bus) -> None:
    with pytest.raises(TooLargeError, match=r"2000000 bytes on rt\.x"):
        await bus.publish("rt.x", b"x" * 2_000_000)
    assert bus.connection.is_up
    assert isinstance(await bus.request("$JS.API.INFO", b"", 5 * SECOND_US), Msg)


async def test_a_cancellation_during_a_full_buffer_is_not_swallowed(
    impatient_bus: Bus, nats_server: NatsServer
) -> None:
    bus = impatient_bus
    nats_server.pause()

    async def say_for_ever() -> None:
        while True:
            await bus.publish("rt.metrics.a", b"x" * 900_000)
            await asyncio.sleep(0)

    task = asyncio.create_task(say_for_ever())
    await asyncio.sleep(0.2)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=10)
    assert {task} == done
    assert task.cancelled()
    nats_server.resume()


async def test_connecting_waits_for_a_server_that_is_not_there_yet(
    nats_server: NatsServer, settings: ServiceSettings
) -> None:
    nats_server.kill()
    connecting = asyncio.create_task(Bus.connect(settings, "early"))
    await asyncio.sleep(0)
    assert not connecting.done()
    nats_server.start()
    await (await connecting).close()


async def test_giving_up_to_connect_leaves_nothing_behind(nats_server: NatsServer, settings: ServiceSettings) -> None:
    nats_server.kill()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await Bus.connect(settings, "never")
    assert {asyncio.current_task()} == asyncio.all_tasks()


async def test_every_answer_of_many_is_gathered(bus: Bus, nats_url: str) -> None:
    client = await nats.connect(nats_url)

    async def answer(msg: nats.aio.msg.Msg) -> None:
        for number in range(3):
            await client.publish(msg.reply, b"%d" % number)

    await client.subscribe("rt.many", cb=answer)
    await client.flush()
    answers = await bus.request_all("rt.many", wait_us=1_500_000)
    assert [b"0", b"1", b"2"] == [msg.body for msg in answers]
    await client.close()


async def test_closing_while_the_server_is_away_leaves_nothing_behind(
    nats_server: NatsServer, settings: ServiceSettings
) -> None:
    bus = await Bus.connect(settings, "short")
    nats_server.kill()
    await until(lambda: not bus.connection.is_up)
    await bus.close()
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})


async def test_an_attempt_that_fails_in_the_moment_in_which_it_is_cancelled_is_the_last() -> None:
    connection, attempts, trying = Connection(), [], asyncio.Event()

    async def fails_when_cancelled(server: object) -> None:
        attempts.append(server)
        trying.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:  # what asyncio.wait_for of Python 3.11 does
            raise ConnectionRefusedError from None

    connection._client._connect_to_server = fails_when_cancelled  # type: ignore[method-assign]
    opening = asyncio.create_task(connection.open("nats://127.0.0.1:1", "late", SECOND_US))
    await trying.wait()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(opening, 10)
    assert 1 == len(attempts)
