// Reads a snapshot beside the page, so that the page stays responsive, and answers for its states.

import { PickleError, unpickleFrom } from "./pickle.js";
import { devicesOf, Recording, SnapshotError } from "./recording.js";

// Parts of a snapshot that the page does not show, which are most of it.
const OMITTED = new Set(["frames", "forward_frames", "cpp_frames", "history", "user_metadata", "compile_context"]);

let snapshot = null;
let recording = null;

const acts = {
  open({ file }) {
    const reader = new FileReaderSync();
    const read = (from, length) => reader.readAsArrayBuffer(file.slice(from, from + length));
    const value = unpickleFrom(read, file.size, OMITTED);
    snapshot = Array.isArray(value) ? { segments: value } : value; // of torch.cuda.memory_snapshot()
    return { devices: devicesOf(snapshot) };
  },
  device({ device }) {
    recording = new Recording(snapshot, device);
    const timeline = recording.timeline();
    return { events: recording.length, timeline };
  },
  map({ event }) {
    recording.seek(event);
    return { map: recording.map() };
  },
  age({ event, address }) {
    recording.seek(event);
    return { seconds: recording.age(address) };
  },
};

onmessage = ({ data: { id, act, ...given } }) => {
  try {
    postMessage({ id, ...acts[act](given) });
  } catch (error) {
    const isKnown = error instanceof PickleError || error instanceof SnapshotError;
    postMessage({ id, error: isKnown ? error.message : `The file cannot be read (${error.message}).` });
  }
};
