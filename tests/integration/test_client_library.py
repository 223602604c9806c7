"""What we rely on in the pinned client library, tried on the real server: a release without it must not come in."""

import asyncio
import contextlib

from tests.outside import connect


async def test_B12_a_cancelled_wait_for_a_message_does_not_swallow_the_next_one(nats_url: str) -> None:
    client = await connect(nats_url)
    subscription = await client.subscribe("here")
    await client.flush()
    for body in (b"one", b"two", b"three"):
        waiting = asyncio.create_task(anext(aiter(subscription.messages)))
        await asyncio.sleep(0)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        await client.publish("here", body)
        assert (await subscription.next_msg(5)).data == body
    await client.close()
