// A chat over /v1/chat/completions and the server's numbers from /stats. What a model writes is
// only ever put into the page as text.
"use strict";

const byId = (id) => document.getElementById(id);
const log = byId("log");
const prompt = byId("prompt");
const talk = []; // messages so far, as the API wants them
let running = null; // the AbortController of the answer that is coming

function headers() {
  const key = byId("key").value.trim();
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

function add(kind, text) {
  byId("hint").hidden = true;
  const made = document.createElement("div");
  made.className = kind;
  made.textContent = text;
  log.append(made);
  log.scrollTop = log.scrollHeight;
  return made;
}

function follow() {
  // Only if the reader is at the end; not if they have gone back to read.
  if (log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
    }
  }
}

function request() {
  const system = byId("system").value.trim();
  const most = Number(byId("max-tokens").value);
  return {
    messages: system ? [{ role: "system", content: system }, ...talk] : talk,
    temperature: Number(byId("temperature").value),
    top_p: Number(byId("top-p").value) || 1,
    ...(most > 0 && { max_tokens: most }),
    stream: true,
    stream_options: { include_usage: true },
  };
}

async function reason(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `${answer.status} ${answer.statusText}`;
  }
}

async function ask(text) {
  talk.push({ role: "user", content: text });
  add("said user", text);
  const bubble = add("said assistant busy", "");
  const facts = add("facts", "");
  log.setAttribute("aria-busy", "true"); // screen readers get the answer when it is whole
  running = new AbortController();
  show();
  const start = performance.now();
  let first = null;
  let last = start;
  let chunks = 0;
  let tokens = null;
  let end = "";
  const tell = () => {
    const count = tokens ?? chunks;
    const seconds = (last - first) / 1000;
    const rate = count > 1 && seconds > 0 ? `, ${((count - 1) / seconds).toFixed(1)} tokens/s` : "";
    const wait = first === null ? "" : `, first after ${((first - start) / 1000).toFixed(2)} s`;
    facts.textContent = `${count} tokens${rate}${wait}${end}`;
  };
  try {
    const answer = await fetch("/v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(request()), signal: running.signal,
    });
    if (!answer.ok) throw new Error(await reason(answer));
    for await (const event of events(answer.body)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) tokens = event.usage.completion_tokens;
      const choice = event.choices[0];
      if (choice) {
        last = performance.now();
        first ??= last;
        chunks += 1;
        bubble.textContent += choice.delta.content ?? "";
        if (choice.finish_reason === "length") end = ", cut off at the length limit";
      }
      tell();
      follow();
    }
  } catch (error) {
    end = error.name === "AbortError" ? ", stopped" : ` ${error.message}`;
    tell();
    facts.classList.toggle("bad", error.name !== "AbortError");
    if (error.name !== "AbortError" && !chunks) facts.textContent = error.message;
  }
  if (bubble.textContent) talk.push({ role: "assistant", content: bubble.textContent });
  else {
    talk.pop(); // a question without an answer would be asked again with the next
    if (!chunks) bubble.remove();
  }
  bubble.classList.remove("busy");
  log.setAttribute("aria-busy", "false");
  running = null;
  show();
  follow();
}

function show() {
  byId("stop").hidden = running === null;
  byId("send").hidden = running !== null;
  byId("clear").disabled = running !== null;
  if (running === null) prompt.focus();
}

function grow() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = prompt.value.trim();
  if (!text || running) return;
  prompt.value = "";
  grow();
  ask(text);
});
byId("stop").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", () => {
  talk.length = 0;
  log.replaceChildren(byId("hint"));
  byId("hint").hidden = false;
  prompt.focus();
});
prompt.addEventListener("input", grow);
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("ask").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});

let before = null; // the last reading, for tokens a second
async function watch() {
  if (!document.hidden) {
    const status = byId("status");
    try {
      const answer = await fetch("/stats", { headers: headers() });
      if (!answer.ok) throw new Error(await reason(answer));
      const told = await answer.json();
      const now = performance.now();
      if (before) {
        const made = told.generation_tokens - before.tokens;
        byId("rate").textContent = ((1000 * made) / (now - before.at)).toFixed(0);
      }
      before = { tokens: told.generation_tokens, at: now };
      byId("model").textContent = `${told.model}, ${told.max_model_len} tokens`;
      byId("running").textContent = told.running;
      byId("waiting").textContent = told.waiting;
      byId("kv").value = told.kv_used;
      byId("kv-text").textContent = `${(100 * told.kv_used).toFixed(0)} %`;
      status.textContent = told.healthy ? "" : "the server is stopping";
      status.classList.remove("bad");
    } catch (error) {
      status.textContent = error instanceof TypeError ? "the server does not answer" : error.message;
      status.classList.add("bad");
    }
  }
  setTimeout(watch, 1000);
}
watch();
