// Images of chat messages: files that the user drops, pastes or chooses, scaled down if they are large, and their thumbnails.
// An image is {name, thumbnail, url}: two data URLs. `url` is what the model gets; images of a kept conversation have none.

export const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];
const TYPE_WORDS = "PNG, JPEG, WebP, GIF or BMP";
const ENDINGS = /\.(png|jpe?g|webp|gif|bmp)$/i;
const LONGEST_SIDE = 2048; // pixels; 1120 tokens, the most that an image has, are 1600 x 1600
const MAX_BYTES = 4_000_000; // of a file that is sent as it is
const THUMBNAIL_SIDE = 256;

// Whether a file is an image, and no text. SVG is text. A file that is dropped may have no type.
export const isImage = (file) => (file.type ? file.type.startsWith("image/") && file.type !== "image/svg+xml" : ENDINGS.test(file.name));

function draw(bitmap, longest) {
  const scale = Math.min(1, longest / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(scale * bitmap.width));
  canvas.height = Math.max(1, Math.round(scale * bitmap.height));
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.fillStyle = "white"; // JPEG has no transparency
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas;
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read: ${reader.error.message}`));
    reader.readAsDataURL(file);
  });
}

// The largest JPEG below the limit on bytes.
function scaleDown(bitmap) {
  for (let side = LONGEST_SIDE; ; side = Math.round(side / 1.5)) {
    const canvas = draw(bitmap, side);
    const url = canvas.toDataURL("image/jpeg", 0.9);
    if (url.length * 0.75 <= MAX_BYTES) return { url, size: [canvas.width, canvas.height] };
  }
}

// Reads a file. `size` of the image is [width, height] if it was scaled down, else null. Throws an error with a sentence.
export async function readImage(file) {
  const bitmap = await createImageBitmap(file).catch(() => null); // turned upright, the first frame
  if (!bitmap) throw new Error(`${file.name} is no image that this browser can show: attach a ${TYPE_WORDS} file`);
  const name = file.name || "image";
  const isLarge = Math.max(bitmap.width, bitmap.height) > LONGEST_SIDE || file.size > MAX_BYTES;
  const isForeign = Boolean(file.type) && !TYPES.includes(file.type); // the browser can show it, the server cannot
  const { url, size } = isLarge || isForeign ? scaleDown(bitmap) : { url: await dataUrl(file) };
  const thumbnail = draw(bitmap, THUMBNAIL_SIDE).toDataURL("image/jpeg", 0.8);
  bitmap.close();
  return { image: { name, url, thumbnail }, size: isLarge ? size : null };
}

// Messages and the content of requests

// The content of a message in a request: a text, or parts. Gemma was trained with images before the text.
export function contentOf({ content, images = [] }) {
  const parts = images.filter(({ url }) => url).map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return parts.length ? [...parts, { type: "text", text: content }] : content;
}

// The text of the content of a request's message.
export const textOf = (content) => (Array.isArray(content) ? content.map(({ text = "" }) => text).join("") : (content ?? ""));

// A message of a request as the page shows it. Of its images a request has the urls; the rest is found in `messages` of the page.
export function messageOf({ role, content }, messages) {
  const images = messages.flatMap((message) => message.images ?? []);
  const urls = Array.isArray(content) ? content.filter(({ type }) => type === "image_url").map((part) => part.image_url.url) : [];
  return { role, content: textOf(content), ...(urls.length ? { images: urls.map((url) => images.find((image) => image.url === url) ?? { name: "image", url }) } : {}) };
}

// A message as this browser keeps it: images are too large, their thumbnails are not.
export function keptMessage({ images, ...message }, withThumbnails) {
  return images ? { ...message, images: images.map(({ name, thumbnail }) => ({ name, ...(withThumbnails ? { thumbnail } : {}) })) } : message;
}

export const hasLostImages = (messages) => messages.some(({ images = [] }) => images.some(({ url }) => !url));
