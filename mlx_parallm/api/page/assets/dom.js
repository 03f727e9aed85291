// Building elements. Text is only ever set as text, so that nothing a model writes becomes markup.

/**
 * An element with attributes, event listeners ("onclick": function) and children (nodes or texts).
 * Attributes that are null or false are left out.
 */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== false) element.setAttribute(name, String(value));
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** The same for SVG. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

/** The one element with a `data-part` of this name below a root. */
export function part(root, name) {
  return root.querySelector(`[data-part="${name}"]`);
}

/** Set a text only if it differs, so that an unchanged page is not laid out again. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Copy a text, and say so on the button that was pressed. */
export async function copyText(button, text) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    // Browsers refuse on pages that are not secure; the text can still be selected.
    button.textContent = "Not allowed";
  }
  setTimeout(() => (button.textContent = label), 1200);
}
