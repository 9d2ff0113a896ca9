// Asking the server, and its events as they come.

const KEY = "redraft-key";

async function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  return fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

// A sentence for whatever is not an answer.
async function mistake(answer) {
  const told = await answer.json().catch(() => null);
  return told?.error?.message ?? `the server answered ${answer.status}`;
}

export async function* events(path, body, signal, askKey) {
  let answer = await post(path, body, signal);
  while (answer.status === 401) {
    const key = await askKey();
    if (!key) throw new Error("this server wants its API key");
    sessionStorage.setItem(KEY, key);
    answer = await post(path, body, signal);
  }
  if (!answer.ok) throw new Error(await mistake(answer));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

export async function modelName() {
  const key = sessionStorage.getItem(KEY);
  const answer = await fetch("/v1/models", key ? { headers: { Authorization: `Bearer ${key}` } } : {}).catch(() => null);
  return answer?.ok ? (await answer.json()).data[0].id : "";
}
