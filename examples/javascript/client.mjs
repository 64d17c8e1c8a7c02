// A client of prefixd in JavaScript, made from proto/prefixd.proto and docs/other-languages.md only:
// opens a session, saves a state, claims, reads and checks it, releases and deletes it, and watches its
// key come and go.
//
//     npm install @grpc/grpc-js @grpc/proto-loader
//     node client.mjs ../../proto/prefixd.proto unix:/run/prefixd/prefixd.sock
//     PREFIXD_TLS_CA=ca.pem PREFIXD_TOKEN_FILE=token node client.mjs ../../proto/prefixd.proto 10.0.0.5:7070
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const require = createRequire(import.meta.url);
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");
const [protoFile, address] = process.argv.slice(2);

// ---- keys (docs/other-languages.md)

const u32 = (number) => { const raw = Buffer.alloc(4); raw.writeUInt32LE(number); return raw; };
const sha256 = (...parts) => parts.reduce((hash, part) => hash.update(part), createHash("sha256")).digest();

/** The key of the whole state of `tokens`, in a namespace without adapters, salt and shard. */
export function prefixKey({ fingerprint, quantisation, contextParams }, tokens) {
  const name = Buffer.alloc(8);
  Buffer.from(quantisation).copy(name);
  return sha256(fingerprint, name, contextParams, ...tokens.map(u32));
}

/** The keys of the complete blocks of `tokens`. */
export function blockKeys(namespace, tokens, blockTokens) {
  const keys = [];
  let parent = prefixKey(namespace, []);
  for (let index = 0; (index + 1) * blockTokens <= tokens.length; index++) {
    const block = tokens.slice(index * blockTokens, (index + 1) * blockTokens);
    parent = sha256(parent, u32(index), ...block.map(u32));
    keys.push(parent);
  }
  return keys;
}

/** CRC32C (Castagnoli), which every payload has. */
export function crc32c(data) {
  let crc = 0xffffffff;
  for (const byte of data) {
    crc ^= byte;
    for (let bit = 0; bit < 8; bit++) crc = (crc >>> 1) ^ (crc & 1 ? 0x82f63b78 : 0);
  }
  return (crc ^ 0xffffffff) >>> 0;
}

// ---- calls

const definition = protoLoader.loadSync(protoFile, { keepCase: true, longs: String, enums: String });
const { Admin, Cache } = grpc.loadPackageDefinition(definition).prefixd.v1;

/** Over TCP: TLS, and the token with each call. */
function credentials() {
  const { PREFIXD_TLS_CA: ca, PREFIXD_TOKEN_FILE: file } = process.env;
  if (!ca) return grpc.credentials.createInsecure();
  const channel = grpc.credentials.createSsl(readFileSync(ca));
  if (!file) return channel;
  const metadata = new grpc.Metadata();
  metadata.set("authorization", `Bearer ${readFileSync(file, "utf8").trim()}`);
  const token = grpc.credentials.createFromMetadataGenerator((_, callback) => callback(null, metadata));
  return grpc.credentials.combineChannelCredentials(channel, token);
}

const cache = new Cache(address, credentials());
// Operators are served on a socket beside that of the workers. With TLS and a token: at the same address.
const admin = new Admin(address.startsWith("unix:") ? `${address}.admin` : address, credentials());
const call = (name, request) => new Promise((resolve, reject) =>
  cache[name](request, { deadline: Date.now() + 10_000 }, (error, response) => error ? reject(error) : resolve(response)));

/** Open a session. Its heartbeats renew its claims; its end releases them. */
const openSession = () => new Promise((resolve, reject) => {
  const stream = cache.Session();
  stream.on("error", reject);
  stream.on("data", ({ welcome }) => {
    if (!welcome) return; // an answer to a heartbeat, or the loss of a claim
    let sequence = 0;
    const beat = setInterval(() => stream.write({ heartbeat: { sequence: ++sequence } }), welcome.heartbeat_interval_ms);
    const { incarnation, session_id, session_secret: secret } = welcome;
    resolve({ ref: { incarnation, session_id, secret }, version: welcome.daemon_version,
              close: () => { clearInterval(beat); stream.end(); } });
  });
  stream.write({ hello: { client_name: "javascript", client_version: "example 1", pid: process.pid } });
});

/** Save what one message holds. Larger saves go on with messages that have parts only. */
const save = (message) => new Promise((resolve, reject) => {
  const stream = cache.Save((error, response) => (error ? reject(error) : resolve(response)));
  stream.end(message);
});

/** The bytes of the first entry of a claim. They count only if their CRC32C is that of the entry. */
const read = (session, claim, entry) => new Promise((resolve, reject) => {
  const parts = [];
  const length_bytes = entry.payload_bytes;
  const stream = cache.Read({ session: session.ref, claim_id: claim.claim_id, ranges: [{ index: 0, length_bytes }] });
  stream.on("error", reject);
  stream.on("data", (response) => response.parts.forEach(({ data }) => data && parts.push(data)));
  stream.on("end", () => {
    const payload = Buffer.concat(parts);
    crc32c(payload) === entry.payload_crc32c ? resolve(payload) : reject(new Error("other bytes than were saved"));
  });
});

/** Follow which keys are published. Resolves when all that were there are known, to what waits for an event. */
const openWatch = () => new Promise((resolve, reject) => {
  const seen = [], waiting = [];
  const stream = admin.Watch({});
  const event = (kind, key) => new Promise((found) => {
    waiting.push(() => seen.some((each) => each.kind === kind && each.key.equals(key)) && found(kind));
    waiting.at(-1)();
  });
  stream.on("error", (error) => error.code === grpc.status.CANCELLED || reject(error));
  stream.on("data", ({ events }) => {
    seen.push(...events);
    if (events.some(({ kind }) => kind === "WATCH_KIND_SYNCED")) resolve({ event, close: () => stream.cancel() });
    waiting.forEach((look) => look());
  });
});

if (process.argv[1].endsWith("client.mjs")) {
  const watch = await openWatch();
  const session = await openSession();
  const namespace = { fingerprint: sha256("weights"), quantisation: "q4_0", contextParams: sha256("context") };
  const tokens = Array.from({ length: 700 }, (_, number) => number);
  const key = prefixKey(namespace, tokens);
  const payload = Buffer.from("the state of 700 tokens");
  const header = { session: session.ref, tier: "TIER_RAM", reason: "SAVE_REASON_FINISH", keys: [key],
                   payload_bytes: [payload.length], token_counts: [tokens.length], layer_counts: [0], token_ids: [] };
  const parts = [{ item: 0, offset_bytes: 0, data: payload, last: true, payload_crc32c: crc32c(payload) }];
  const saved = await save({ header, parts });
  const watched = [await watch.event("WATCH_KIND_PUBLISHED", key)];
  const claim = await call("Claim", { session: session.ref, keys: [key], mode: "CLAIM_MODE_FIRST" });
  const bytes = await read(session, claim, claim.results[0].entry);
  const released = await call("Release", { session: session.ref, claim_ids: [claim.claim_id] });
  const deleted = await call("Delete", { session: session.ref, keys: [key] });
  watched.push(await watch.event("WATCH_KIND_EVICTED", key));
  console.log(JSON.stringify({
    key: key.toString("hex"), blocks: blockKeys(namespace, tokens, 300).map((each) => each.toString("hex")),
    saved: saved.results[0].status, read: bytes.toString(), released: released.results[0],
    deleted: deleted.results[0], watched, version: session.version }));
  session.close();
  watch.close();
}
