// A run as one HTML file: the player, the style sheet and the run itself. It loads nothing.

const PARTS = ["run.js", "timeline.js", "player.js"];

const fetchFile = async (name) => (await fetch(`/page/${name}`)).text();
const withoutModules = (source) => source.replace(/^import .*$/gm, "").replace(/^export /gm, "");
const escapeHtml = (text) => text.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);

// Returns the HTML file.
export async function replay(run, title) {
  const [style, ...sources] = await Promise.all(["style.css", ...PARTS].map(fetchFile));
  const withoutImages = (key, value) => (key === "image_url" ? undefined : value); // a replay is made to be shared, and does not show them
  const data = JSON.stringify(run.saved, withoutImages).replaceAll("<", "\\u003c");
  return `<!doctype html>
<html lang="en" class="replay"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'">
<title>${escapeHtml(title)}</title><style>${style}</style></head>
<body><header><h1>redraft</h1><p>${escapeHtml(title)}</p></header><main id="player" class="player"></main>
<script type="application/json" id="run">${data}</script>
<script type="module">${sources.map(withoutModules).join("\n")}
const player = new Player(document.getElementById("player"));
player.show(Run.from(JSON.parse(document.getElementById("run").textContent)));
player.timeline.go(0);
player.timeline.start();
document.addEventListener("keydown", (event) => {
  if (event.target.matches("input, select, button")) return;
  const act = { " ": () => player.timeline.toggle(), j: () => player.timeline.step(1), k: () => player.timeline.step(-1), o: () => player.toggleOrder() }[event.key];
  if (act) { event.preventDefault(); act(); }
});
</script></body></html>
`;
}

// Downloads a text or blob as a file.
export function save(text, name, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
