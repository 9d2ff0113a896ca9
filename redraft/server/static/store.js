// Runs that this browser keeps: in IndexedDB, the newest of them. Without one (a private window), nothing is kept.

const RUNS_KEPT = 40;
const MAX_CHARACTERS = 8_000_000; // of one run as JSON

const done = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

async function open() {
  const opening = indexedDB.open("redraft", 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore("runs", { keyPath: "id" });
  return done(opening);
}

let database = null;
async function runs(access) {
  database ??= await open();
  return database.transaction("runs", access).objectStore("runs");
}

// Keeps a run, and forgets the oldest ones.
export async function keepRun(run, title) {
  const saved = { id: Date.now() + Math.random(), title, ...run.saved };
  if (JSON.stringify(saved).length > MAX_CHARACTERS) return;
  const store = await runs("readwrite").catch(() => null);
  if (!store) return;
  await done(store.put(saved));
  const ids = await done(store.getAllKeys());
  for (const id of ids.slice(0, -RUNS_KEPT)) store.delete(id);
}

// All kept runs, the newest first.
export async function keptRuns() {
  const store = await runs("readonly").catch(() => null);
  return store ? (await done(store.getAll())).reverse() : [];
}

export async function forgetRuns() {
  const store = await runs("readwrite").catch(() => null);
  if (store) await done(store.clear());
}

// Links: the tab and the request of a run. With its seed, the request reproduces the run.

const encode = (text) => btoa(Array.from(new TextEncoder().encode(text), (byte) => String.fromCharCode(byte)).join("")).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
const decode = (text) => new TextDecoder().decode(Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (c) => c.charCodeAt(0)));

export const linkOf = (run) => `#${run.kind}/${encode(JSON.stringify({ ...run.request.body, seed: run.begin.seed }))}`;

// [tab, body] of a link; the body is null where the link has none.
export function readLink(hash) {
  const [mode, data] = hash.replace(/^#/, "").split("/");
  try {
    return [mode, data ? JSON.parse(decode(data)) : null];
  } catch {
    return [mode, null];
  }
}
