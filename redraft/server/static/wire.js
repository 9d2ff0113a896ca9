// Requests to the server, and its events as they arrive.

const KEY = "redraft-key";

async function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  return fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

// The message of an error response.
async function errorMessage(response) {
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? `the server answered ${response.status}`;
}

// Yields the events of a request. `askKey` is called when the server needs an API key.
export async function* events(path, body, signal, askKey) {
  let response = await post(path, body, signal);
  while (response.status === 401) {
    const key = await askKey();
    if (!key) throw new Error("this server needs its API key");
    sessionStorage.setItem(KEY, key);
    response = await post(path, body, signal);
  }
  if (!response.ok) throw new Error(await errorMessage(response));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

// The models and adapters that the server has, the default first; none if it does not say.
export async function listModels() {
  const key = sessionStorage.getItem(KEY);
  const response = await fetch("/v1/models", key ? { headers: { Authorization: `Bearer ${key}` } } : {}).catch(() => null);
  return response?.ok ? (await response.json()).data : [];
}

// Runs of a tab that ship with the page; none for a tab without.
export async function recordedRuns(mode) {
  const response = await fetch(`/page/recorded_${mode}.json`);
  return response.ok ? response.json() : [];
}
