//! Columns of Parquet files: token ids as lists of int32, texts, and what every file of ours is written with.

use arrow_array::builder::{Int32Builder, ListBuilder};
use arrow_array::cast::AsArray;
use arrow_array::types::Int32Type;
use arrow_array::{Array, ArrayRef, ListArray, RecordBatch, StringArray};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::errors::ParquetError;
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;
use std::sync::Arc;

/// A batch as the bytes of a Parquet file.
pub(crate) fn to_parquet(batch: &RecordBatch, metadata: Vec<KeyValue>) -> Result<Vec<u8>, String> {
    let properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::default()))
        .set_key_value_metadata(Some(metadata))
        .build();
    let mut bytes = Vec::new();
    let write = || -> Result<(), ParquetError> {
        let mut writer = ArrowWriter::try_new(&mut bytes, batch.schema(), Some(properties))?;
        writer.write(batch)?;
        writer.close().map(drop)
    };
    write().map_err(|error| error.to_string())?;
    Ok(bytes)
}

pub(crate) fn texts<'t>(texts: impl Iterator<Item = &'t str>) -> ArrayRef {
    Arc::new(StringArray::from_iter_values(texts))
}

pub(crate) fn id_lists<'a>(lists: impl Iterator<Item = &'a [u32]>) -> Result<ArrayRef, String> {
    let mut builder = ListBuilder::new(Int32Builder::new());
    for list in lists {
        for &id in list {
            builder.values().append_value(signed(id)?);
        }
        builder.append(true);
    }
    Ok(Arc::new(builder.finish()))
}

pub(crate) fn signed(number: u32) -> Result<i32, String> {
    i32::try_from(number).map_err(|_| format!("{number} is too large for a 32-bit column"))
}

/// A column under its name, as the type it must have; nulls would read as zeros, so there must be none.
pub(crate) fn column<'a, T>(batch: &'a RecordBatch, name: &str, cast: fn(&'a dyn Array) -> Option<T>) -> Result<T, String> {
    let array = batch.column_by_name(name).ok_or_else(|| format!("column `{name}` is missing"))?;
    if array.null_count() > 0 {
        return Err(format!("column `{name}` has empty cells"));
    }
    cast(array).ok_or_else(|| format!("column `{name}` has the type {}", array.data_type()))
}

pub(crate) fn strings<'a>(batch: &'a RecordBatch, name: &str) -> Result<&'a StringArray, String> {
    column(batch, name, |array| array.as_string_opt::<i32>())
}

pub(crate) fn ids(lists: &ListArray, row: usize, name: &str) -> Result<Vec<u32>, String> {
    let list = lists.value(row);
    let list = list.as_primitive_opt::<Int32Type>().ok_or_else(|| format!("column `{name}` is not a list of int32"))?;
    list.values().iter().map(|&id| unsigned(id, name)).collect()
}

pub(crate) fn unsigned(number: i32, name: &str) -> Result<u32, String> {
    u32::try_from(number).map_err(|_| format!("column `{name}` has the negative value {number}"))
}
