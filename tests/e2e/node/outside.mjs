// A plain NATS client in JavaScript: imports nothing of Laxity, speaks subjects and JSON alone.
// usage: node outside.mjs NATS_URL REQUEST_ID  -> prints one JSON object with what it saw
import { connect } from "@nats-io/transport-node";
import { jetstream } from "@nats-io/jetstream";

const [url, requestId] = process.argv.slice(2);
const nc = await connect({ servers: url, timeout: 5000 });
const request = {
  request_id: requestId,
  command: ["python", "-c", "import time; time.sleep(600)"],
  gpu: { share: 0.1 },
  candidates: { all_except: ["node-1"] },
};

const inbox = `_INBOX.${requestId}`;
const replies = [];
const subscription = nc.subscribe(inbox);
(async () => {
  for await (const message of subscription) replies.push(message.json());
})();
nc.publish("rt.place", JSON.stringify(request), { reply: inbox });

const until = Date.now() + 15000;
while (replies.length === 0 && Date.now() < until) await new Promise((done) => setTimeout(done, 20));
const again = (await nc.request("rt.place", JSON.stringify(request), { timeout: 10000 })).json();

const consumer = await jetstream(nc).consumers.get("RT_EVENTS", { filter_subjects: `rt.events.place.${requestId}` });
const states = [];
while (!states.includes("started") && Date.now() < until) {
  const message = await consumer.next({ expires: 1000 });
  if (message) states.push(message.json().state);
}
const released = (await nc.request("rt.release", JSON.stringify({ request_id: requestId }), { timeout: 10000 })).json();
console.log(JSON.stringify({ replies, again, states, released }));
await nc.close();
