// The canvas as a picture: draws the text where the browser has laid it out, in the same colours.

const SCALE = 2; // image pixels per CSS pixel

export function picture(shown) {
  const box = shown.getBoundingClientRect();
  const paper = Object.assign(document.createElement("canvas"), { width: SCALE * box.width, height: SCALE * box.height });
  const pen = paper.getContext("2d");
  pen.scale(SCALE, SCALE);
  pen.translate(-box.left, -box.top);
  pen.fillStyle = getComputedStyle(shown).backgroundColor;
  pen.fillRect(box.left, box.top, box.width, box.height);
  for (const part of shown.querySelectorAll("*")) drawBackground(pen, part);
  const texts = document.createTreeWalker(shown, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) drawText(pen, texts.currentNode);
  return new Promise((done) => paper.toBlob(done, "image/png"));
}

// Draws backgrounds, borders and underlines.
function drawBackground(pen, part) {
  const style = getComputedStyle(part);
  for (const { left, top, width, height } of part.getClientRects()) {
    pen.fillStyle = style.backgroundColor;
    pen.fillRect(left, top, width, height);
    pen.strokeStyle = style.borderTopColor;
    if (part.tagName === "TD") pen.strokeRect(left, top, width, height);
    pen.strokeStyle = style.textDecorationColor;
    if (style.textDecorationLine === "underline") drawLine(pen, left, top + height - 1, width);
  }
}

function drawLine(pen, left, height, width) {
  pen.beginPath();
  pen.moveTo(left, height);
  pen.lineTo(left + width, height);
  pen.stroke();
}

function drawText(pen, node) {
  const style = getComputedStyle(node.parentElement);
  pen.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
  pen.fillStyle = style.color;
  pen.textBaseline = "middle";
  const range = document.createRange();
  let at = 0;
  for (const letter of node.data) {
    range.setStart(node, at);
    range.setEnd(node, (at += letter.length));
    const { left, top, height } = range.getBoundingClientRect();
    if (letter.trim()) pen.fillText(letter, left, top + height / 2);
  }
}
