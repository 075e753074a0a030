//! Takes the data of options apart, and builds replies to options.

use super::super::wire::{self, u16_at, u32_at};

/// Bytes of a reply without data.
pub(super) const REPLY_BYTES: usize = 20;

/// The name and the information requests of `INFO` and `GO`, if the lengths add up.
pub(super) fn split_info(data: &[u8]) -> Option<(&[u8], &[u8])> {
    let length = u32_at(data, 0)? as usize;
    let name = data.get(4..length.checked_add(4)?)?;
    let count = u16_at(data, 4 + length)? as usize;
    let requests = &data[6 + length..];
    (requests.len() == 2 * count).then_some((name, requests))
}

/// The export's name and the queries of the two context options, if the lengths add up.
pub(super) fn split_queries(data: &[u8]) -> Option<(&[u8], impl Iterator<Item = &[u8]>)> {
    let length = u32_at(data, 0)? as usize;
    let name = data.get(4..length.checked_add(4)?)?;
    let count = u32_at(data, 4 + length)?;
    let queries = &data[8 + length..];

    fn next<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
        let length = u32_at(rest, 0)? as usize;
        let query = rest.get(4..length.checked_add(4)?)?;
        *rest = &rest[4 + length..];
        Some(query)
    }
    // The first pass checks that exactly `count` queries fill the data. Each query takes at least 4
    // bytes, so the loop ends.
    let mut rest = queries;
    for _ in 0..count {
        next(&mut rest)?;
    }
    if !rest.is_empty() {
        return None;
    }
    let mut rest = queries;
    Some((name, std::iter::from_fn(move || next(&mut rest))))
}

pub(super) fn reply(output: &mut Vec<u8>, option: u32, kind: u32, data: &[&[u8]]) {
    output.extend_from_slice(&wire::OPTION_REPLY_MAGIC.to_be_bytes());
    output.extend_from_slice(&option.to_be_bytes());
    output.extend_from_slice(&kind.to_be_bytes());
    let length: usize = data.iter().map(|part| part.len()).sum();
    output.extend_from_slice(&(length as u32).to_be_bytes());
    for part in data {
        output.extend_from_slice(part);
    }
}

pub(super) fn error(output: &mut Vec<u8>, option: u32, kind: u32, text: &str) {
    reply(output, option, kind, &[text.as_bytes()]);
}
